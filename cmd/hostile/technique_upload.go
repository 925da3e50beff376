package main

var _ = register(technique{
	Name:   "upload",
	What:   "a bulk upload through the proxy, as fast as it goes, beside the ticks",
	Layers: []string{"network"},
	Signs:  []sign{{What: "bulk", N: 8 << 20}},
	parts:  "ticks,bulk,token",
	tune:   func(c *config) { c.bulkRate = 0 },
})
