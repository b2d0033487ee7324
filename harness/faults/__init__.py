"""Fault injection for drills: the plan, and one injector per kind of fault."""
