package main

import (
	"fmt"
	"net/netip"
	"net/url"
	"time"

	"tagout/internal/config"
	"tagout/internal/credential"
	"tagout/internal/leased"
	"tagout/internal/provider"
)

// requests is how many requests one try at a provider makes at most: a login, a refusal, another login and the request.
const requests = 3

// minLifetime is the shortest lease that is kept: it is replaced when two thirds of it are over.
const minLifetime = 10 * time.Second

// lessors makes the configured providers. A certificate authority that cannot be read ends the start.
func lessors(box *config.Box) ([]credential.Lessor, error) {
	var out []credential.Lessor
	for _, p := range box.Providers {
		call, err := caller(box, p, p.URL, p.Addresses)
		if err != nil {
			return nil, fmt.Errorf("reading provider %s: %w", p.Name, err)
		}
		from := credential.Lessor{Name: p.Name, Own: p.Secrets(), Hosts: p.Hosts()}
		for _, r := range p.Roles {
			from.Roles = append(from.Roles, r.Name)
		}
		iam := call
		if p.Kind == config.ProviderAWS && len(from.Hosts) > 1 { // IAM is another host, whose addresses are its own
			if iam, err = caller(box, p, p.IAM, nil); err != nil {
				return nil, fmt.Errorf("reading provider %s: %w", p.Name, err)
			}
		}
		from.Make = func(secrets provider.Secrets) leased.Issuer {
			return leased.Issuer{Provider: issuerOf(p, call, iam, secrets), Attempt: requests * p.Timeout, MaxLifetime: p.MaxLifetime, MinLifetime: minLifetime}
		}
		out = append(out, from)
	}
	return out, nil
}

// caller makes what requests to one of the provider's URLs go through.
func caller(box *config.Box, p config.Provider, at string, addresses []netip.Addr) (provider.Call, error) {
	u, err := url.Parse(at)
	if err != nil {
		return provider.Call{}, err
	}
	place := provider.Place{Host: u.Hostname(), Addresses: addresses, Resolvers: box.Resolvers, CAFiles: box.UpstreamCAs}
	if p.CA != "" {
		place.CAFiles = append([]string{p.CA}, place.CAFiles...)
	}
	client, err := provider.NewHTTP(place)
	return provider.Call{HTTP: client, Timeout: p.Timeout}, err
}

func issuerOf(p config.Provider, call, iam provider.Call, secrets provider.Secrets) provider.Provider {
	switch p.Kind {
	case config.ProviderOpenBao:
		return openBao(p, call, secrets)
	case config.ProviderOAuth:
		return oauth(p, call, secrets)
	case config.ProviderGitHubApp:
		return github(p, call, secrets)
	}
	return aws(p, call, iam, secrets)
}

func openBao(p config.Provider, call provider.Call, secrets provider.Secrets) provider.Provider {
	out := &provider.OpenBao{Call: call, URL: p.URL, Namespace: p.Namespace, TokenFile: p.TokenFile, Mount: p.Mount,
		RoleID: p.SecretRoleID, SecretID: p.SecretSecretID, Secrets: secrets, Roles: map[string]provider.OpenBaoRole{}}
	for _, r := range p.Roles {
		out.Roles[r.Name] = provider.OpenBaoRole{Path: r.Path, Value: r.Value, User: r.User}
	}
	return out
}

func oauth(p config.Provider, call provider.Call, secrets provider.Secrets) provider.Provider {
	out := &provider.OAuth{Call: call, TokenURL: p.URL, RevokeURL: p.RevokeURL, ClientID: p.ClientID, Secret: p.SecretClient, InBody: p.ClientInBody,
		Secrets: secrets, Roles: map[string]provider.OAuthRole{}}
	for _, r := range p.Roles {
		out.Roles[r.Name] = provider.OAuthRole{Scopes: r.Scopes, Audience: r.Audience, Resource: r.Resource, Subject: r.Subject, SubjectType: r.SubjectType}
	}
	return out
}

func github(p config.Provider, call provider.Call, secrets provider.Secrets) provider.Provider {
	out := &provider.GitHubApp{Call: call, URL: p.URL, AppID: p.AppID, Key: p.SecretAppKey, Secrets: secrets, Roles: map[string]provider.GitHubRole{}}
	for _, r := range p.Roles {
		out.Roles[r.Name] = provider.GitHubRole{Installation: r.Installation, Repositories: r.Repositories, Permissions: r.Permissions}
	}
	return out
}

func aws(p config.Provider, sts, iam provider.Call, secrets provider.Secrets) provider.Provider {
	out := &provider.AWS{STS: provider.Endpoint{Call: sts, URL: p.URL, Region: p.Region},
		IAM:   provider.Endpoint{Call: iam, URL: p.IAM, Region: "us-east-1"}, // IAM is one for all regions
		KeyID: p.SecretAccessKeyID, Key: p.SecretAWS, Secrets: secrets, Now: time.Now, Roles: map[string]provider.AWSRole{}}
	for _, r := range p.Roles {
		out.Roles[r.Name] = provider.AWSRole{ARN: r.ARN}
	}
	return out
}
