"""Several engines behind one server: which of them gets a request, and what they are together."""
