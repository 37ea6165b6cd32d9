"""A tap in front of a server that is running: passes everything through, and writes what came as a workload."""
