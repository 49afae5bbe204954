"""Workers on one host or several: what starts them, and the network between them."""
