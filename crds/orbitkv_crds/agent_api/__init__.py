"""What agents tell the operator: `reports.proto`, and the code that `make generate` makes from it."""
