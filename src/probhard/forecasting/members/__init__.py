"""Members of a forecast: models that fit all series, at the end of a history and at past origins."""
