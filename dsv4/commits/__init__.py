"""Commits as variants: each commit's own code in its own process, judged by the audit that was started."""
