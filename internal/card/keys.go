package card

import "tagout/internal/yamlx"

// The keys of a card. The published schema has exactly these; a test compares them.
var (
	cardKeys = []yamlx.Key{
		{Name: "apiVersion", Example: APIVersion},
		{Name: "kind", Example: Kind},
		{Name: "name", Example: "practice"},
		{Name: "task", Example: "Fetch the price list and sum it up."},
		{Name: "owner", Example: "Pricing Team"},
		{Name: "image", Example: "host"},
		{Name: "network", Example: "none"},
		{Name: "reach", Example: `[{addresses: ["10.0.0.5"], ports: [5432]}]`},
		{Name: "egress", Example: "{allow: []}"},
		{Name: "filesystem", Example: "{workspace: 64MiB}"},
		{Name: "identity", Example: "{scope: []}"},
		{Name: "env", Example: "{LANG: C.UTF-8}"},
		{Name: "limits", Example: "{pids: 128}"},
		{Name: "stop", Example: `{authority: "Ada Operator", maxTime: 60s}`},
	}
	egressKeys = []yamlx.Key{
		{Name: "allow", Example: "[{host: api.example.com, ports: [443], protocol: tls}]"},
		{Name: "deny", Example: "[{host: \"**.example.org\"}]"},
	}
	allowKeys = []yamlx.Key{
		{Name: "host", Example: "api.example.com"},
		{Name: "ports", Example: "[443]"},
		{Name: "protocol", Example: "tls"},
		{Name: "inspect", Example: "true"},
		{Name: "credential", Example: "vendor_api"},
		{Name: "methods", Example: "[GET]"},
		{Name: "paths", Example: `["/v1/*"]`},
		{Name: "addresses", Example: `["10.0.0.5"]`},
		{Name: "max_bytes", Example: "{up: 10MiB, down: 1GiB}"},
		{Name: "rate", Example: "50"},
		{Name: "expires", Example: "2h"},
	}
	reachKeys = []yamlx.Key{
		{Name: "addresses", Example: `["10.0.0.5"]`},
		{Name: "ports", Example: "[5432]"},
	}
	bytesKeys = []yamlx.Key{
		{Name: "up", Example: "10MiB"},
		{Name: "down", Example: "1GiB"},
	}
	denyKeys = []yamlx.Key{
		{Name: "host", Example: `"**.example.org"`},
		{Name: "address", Example: `"10.0.0.0/8"`},
		{Name: "ports", Example: "[25]"},
	}
	filesystemKeys = []yamlx.Key{
		{Name: "inputs", Example: "[{from: run.sh, to: /workspace/run.sh}]"},
		{Name: "workspace", Example: "64MiB"},
		{Name: "tmp", Example: "16MiB"},
		{Name: "root", Example: "512MiB"},
		{Name: "noexec", Example: "true"},
	}
	inputKeys = []yamlx.Key{
		{Name: "from", Example: "run.sh"},
		{Name: "to", Example: "/workspace/run.sh"},
		{Name: "mode", Example: `"0755"`},
	}
	identityKeys = []yamlx.Key{
		{Name: "scope", Example: "[{secret: vendor_api, env: VENDOR_API_KEY}]"},
		{Name: "mint", Example: `[{name: books, audience: "https://books.example.com", scope: [books:read], env: BOOKS_TOKEN, hosts: ["books.example.com:443"]}]`},
		{Name: "lifetime", Example: "1h"},
		{Name: "notKeys", Example: "[{file: /workspace/testdata/key.pem, rule: private-key, reason: a test key that opens nothing}]"},
	}
	mintKeys = []yamlx.Key{
		{Name: "name", Example: "books"},
		{Name: "audience", Example: `"https://books.example.com"`},
		{Name: "scope", Example: "[books:read]"},
		{Name: "lifetime", Example: "5m"},
		{Name: "env", Example: "BOOKS_TOKEN"},
		{Name: "hosts", Example: `["books.example.com:443"]`},
		{Name: "file", Example: "/workspace/books.jwt"},
	}
	notKeyKeys = []yamlx.Key{
		{Name: "file", Example: "/workspace/testdata/key.pem"},
		{Name: "env", Example: "FIXTURE"},
		{Name: "rule", Example: "private-key"},
		{Name: "reason", Example: "a test key that opens nothing"},
	}
	secretKeys = []yamlx.Key{
		{Name: "secret", Example: "vendor_api"},
		{Name: "env", Example: "VENDOR_API_KEY"},
	}
	limitKeys = []yamlx.Key{
		{Name: "pids", Example: "128"},
		{Name: "memory", Example: "256MiB"},
		{Name: "cpus", Example: "1"},
		{Name: "openFiles", Example: "1024"},
		{Name: "diskRate", Example: "256MiB"},
		{Name: "idle", Example: "1h"},
		{Name: "lifetime", Example: "24h"},
	}
	stopKeys = []yamlx.Key{
		{Name: "authority", Example: `"Ada Operator"`},
		{Name: "maxTime", Example: "60s"},
		{Name: "trip", Example: "[{on: denied, over: 20, within: 1m, fires: [network]}]"},
		{Name: "lease", Example: "{fires: [network]}"},
	}
	leaseKeys = []yamlx.Key{
		{Name: "fires", Example: "[session, network, credential]"},
	}
)
