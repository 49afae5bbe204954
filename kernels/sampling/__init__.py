"""Random draws and penalties on the device."""
