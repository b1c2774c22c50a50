"""Nearest monotone profiles and profiles of little variation, by compiled loops."""
