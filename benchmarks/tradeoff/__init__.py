"""Does the token budget trade TTFT for ITL on this machine, with the quick start's model and workload?"""
