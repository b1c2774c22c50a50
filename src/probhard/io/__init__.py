"""Files of users: gridded fields, settings, and constraints as plain values."""
