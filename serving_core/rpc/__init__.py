"""The gRPC door: generated messages, conversion to the contract's types, and how channels are set up."""
