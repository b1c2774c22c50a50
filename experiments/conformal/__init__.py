"""Conformal sets: promised against measured coverage, and sizes beside hierarchicalforecast's."""
