"""Free generation: sampling, turn ends, batches whose sequences end apart, and the account of what came out."""
