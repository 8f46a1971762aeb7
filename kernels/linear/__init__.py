"""Linear layer in the format that the checkpoint stores, with quantised activations."""
