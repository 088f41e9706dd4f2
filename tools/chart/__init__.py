"""The parts of the Helm chart that are made from code: values, their schema and table, CRDs and roles."""
