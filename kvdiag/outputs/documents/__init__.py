"""JSON documents and their schemas."""
