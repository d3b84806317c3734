"""The application: command line, launch on Ray, workers, and the router's process."""
