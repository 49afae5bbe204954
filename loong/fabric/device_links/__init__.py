"""Links between devices of two processes each, made and ended one by one, for pairs without shared memory."""
