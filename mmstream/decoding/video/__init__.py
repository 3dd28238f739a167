"""Videos: which frames, at which times, decoded and resized."""
