"""Nearest monotone profiles and profiles of bounded or penalised variation, by compiled loops."""
