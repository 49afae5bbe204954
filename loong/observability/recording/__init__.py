"""All that happened to a scheduler, in a file, so that its decisions can be made again and compared."""
