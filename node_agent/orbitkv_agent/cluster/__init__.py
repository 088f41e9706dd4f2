"""The agent in a Kubernetes cluster: who may attach, what each cache namespace may use, and reports to the operator.

Threads talk to the apiserver and to the operator; they hand what they learn to the owner thread through its mailbox and
never touch its state. Without a `cluster` section in the settings nothing here is imported.
"""
