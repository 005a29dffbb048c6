"""How tiles are computed on one device. Every kernel honours one contract, so any can stand in for any."""
