"""Steps as they come: recorded, planned, foreseen, carried out."""
