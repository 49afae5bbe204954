"""Where the files of a model come from: this disk, a package index, or the hub."""
