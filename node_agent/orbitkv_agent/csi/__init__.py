"""The CSI driver `csi.orbitkv.io`: gives pods the folder of the agent's socket where they may not mount it themselves.

A program of its own (`orbitkv-csi`), which asks nothing of the Kubernetes API and of the agent.
"""
