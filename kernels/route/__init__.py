"""The router: scores, choice of experts, their weights."""
