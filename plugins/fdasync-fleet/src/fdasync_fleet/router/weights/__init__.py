"""Which weights the instances of a router must have: agreement on versions, updates in parts."""
