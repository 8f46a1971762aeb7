"""Engines that are not this project's: the job they are given, how they are run, and what they give back."""
