"""One checkpoint of many ranks: what they tell each other, and how one manifest comes of it."""
