package sandboxd

import (
	"net/http"

	"tagout/internal/apikey"
	"tagout/sandboxd/door"
)

// doorConfig is how the API is served over TCP.
func doorConfig(cfg Config, routes http.Handler) door.Config {
	out := door.Config{
		Listen: cfg.API.Listen, Certificate: cfg.API.Certificate, Key: cfg.API.Key, ClientCA: cfg.API.ClientCA,
		Keys: apikey.NewBook(cfg.Inst.APIKeyFile()), Handler: routes, Audit: cfg.Audit, Log: cfg.Log,
	}
	for _, c := range cfg.API.Clients {
		out.Clients = append(out.Clients, door.Client(c))
	}
	return out
}
