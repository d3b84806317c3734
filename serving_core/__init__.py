"""The contract between the rooms: ids, requests, tickets, page layouts, events, errors, and the generated gRPC code."""
