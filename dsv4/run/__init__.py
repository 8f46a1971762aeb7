"""The stages that compute: checkpoint, references, variants, noise floor, A/B/A."""
