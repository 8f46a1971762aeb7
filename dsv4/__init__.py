"""The judge: checkpoint -> reference -> variant -> metrics -> gate -> report."""
