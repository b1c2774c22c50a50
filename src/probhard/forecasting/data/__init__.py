"""Data: tables of series, frames, time stamps, named data sets."""
