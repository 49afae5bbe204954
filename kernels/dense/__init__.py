"""Linear layers, normalization, activation and the projection that stores KV."""
