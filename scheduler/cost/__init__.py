"""The cost model: roofline, fit, calibration and recalibration."""
