"""`loong bench`: measures servers under load."""
