"""``model check``: whether a model's variants answer as its reference does, on this CPU."""
