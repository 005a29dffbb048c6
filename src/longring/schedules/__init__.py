"""In what order: forward and backward of each schedule side by side. Schedules execute itineraries."""
