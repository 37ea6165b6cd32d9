"""Start, watch and end vLLM servers: the only room in which processes are born and die."""
