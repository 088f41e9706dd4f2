"""Why an engine that asked for the cache runs without it: names that the plugin reports and people read."""

from __future__ import annotations

from enum import StrEnum


class OffReason(StrEnum):
    """One word for each way in which the plugin stays off. The message that comes along says what to do."""

    KV_TRANSFER_CONFIG_PRESENT = "kv-transfer-config-present"
    """The engine was started with a KV connector of the user's choice, which is left as it is."""
    ENGINE_VERSION_UNSUPPORTED = "engine-version-unsupported"
    """The engine is of a version that this release was not tried with."""
    ENGINE_NOT_SERVED = "engine-not-served"
    """This release has no adapter for the engine."""
    PACKAGES_MISSING = "packages-missing"
    """The engine's environment lacks msgspec or numpy."""
    PAYLOAD_MIXED = "payload-mixed"
    """Files of another release of OrbitKV lie before ours on the engine's path."""
    SETTING_INVALID = "setting-invalid"
    """A setting has a value that this release does not take."""
    ENGINE_REFUSED = "engine-refused"
    """The engine does not start with the connector, and starts without it."""
    FEATURE_NOT_SERVED = "feature-not-served"
    """The engine uses something that cannot be combined with the cache yet."""
    LAYOUT_REFUSED = "layout-refused"
    """The engine's KV memory is laid out, or was allocated, in a way that cannot be served."""
    MODEL_UNKNOWN = "model-unknown"
    """The model's weights have no name of their own."""
    PLUGIN_ERROR = "plugin-error"
    """A defect of OrbitKV; the engine's log has the details."""
