"""What reading a trace costs, beside a plain loop over `json.loads`."""
