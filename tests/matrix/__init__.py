"""The integration tests on each server, client library and client setting: `make test-all`."""
