"""The admission webhook: gives annotated pods what their engines need to attach to the cache, and never blocks one."""
