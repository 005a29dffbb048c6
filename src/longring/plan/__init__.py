"""What it will cost, from integers alone: the same itineraries that schedules execute, counted."""
