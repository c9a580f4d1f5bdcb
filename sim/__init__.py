"""Cluster simulator on the protocol core: world, workload, metrics, reports and the command line."""
