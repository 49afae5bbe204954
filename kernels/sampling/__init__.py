"""Random sampling and penalties on the device."""
