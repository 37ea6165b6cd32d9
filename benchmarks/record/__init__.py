"""What the tap of `tune record` adds to TTFT and ITL."""
