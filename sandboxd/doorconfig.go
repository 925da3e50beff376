package sandboxd

import (
	"net/http"

	"tagout/internal/apikey"
	"tagout/sandboxd/api"
	"tagout/sandboxd/door"
	"tagout/sandboxd/mcp"
)

// doorConfig is how the API is served over TCP.
func doorConfig(cfg Config, routes http.Handler) door.Config {
	mux := http.NewServeMux()
	mux.Handle("/", routes)
	mux.Handle("/mcp", mcp.Handler(routes, api.Version))
	out := door.Config{
		Listen: cfg.API.Listen, Certificate: cfg.API.Certificate, Key: cfg.API.Key, ClientCA: cfg.API.ClientCA,
		Keys: apikey.NewBook(cfg.Inst.APIKeyFile()), Handler: mux, Audit: cfg.Audit, Log: cfg.Log,
	}
	for _, c := range cfg.API.Clients {
		out.Clients = append(out.Clients, door.Client(c))
	}
	return out
}
