"""Files of users: gridded fields, settings, and constraints written as plain values."""
