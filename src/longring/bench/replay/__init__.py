"""One rank of a ring of any size, for real: its share is computed, what the others would send is made up."""
