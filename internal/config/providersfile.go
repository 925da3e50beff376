package config

// providerFile is a provider's form in the file, for writing.
type providerFile struct {
	Name         string     `yaml:"name"`
	OpenBao      string     `yaml:"openbao,omitempty"`
	OAuth        string     `yaml:"oauth,omitempty"`
	GitHubApp    string     `yaml:"githubApp,omitempty"`
	AWSSTS       string     `yaml:"awsSTS,omitempty"`
	Addresses    []string   `yaml:"addresses,omitempty"`
	CA           string     `yaml:"ca,omitempty"`
	Timeout      string     `yaml:"timeout,omitempty"`
	MaxLifetime  string     `yaml:"maxLifetime,omitempty"`
	TokenFile    string     `yaml:"tokenFile,omitempty"`
	RoleID       string     `yaml:"roleID,omitempty"`
	SecretID     string     `yaml:"secretID,omitempty"`
	Mount        string     `yaml:"mount,omitempty"`
	Namespace    string     `yaml:"namespace,omitempty"`
	Revoke       string     `yaml:"revoke,omitempty"`
	ClientID     string     `yaml:"clientID,omitempty"`
	ClientSecret string     `yaml:"clientSecret,omitempty"`
	InBody       bool       `yaml:"inBody,omitempty"`
	AppID        string     `yaml:"appID,omitempty"`
	Key          string     `yaml:"key,omitempty"`
	IAM          string     `yaml:"iam,omitempty"`
	Region       string     `yaml:"region,omitempty"`
	AccessKeyID  string     `yaml:"accessKeyID,omitempty"`
	SecretKey    string     `yaml:"secretKey,omitempty"`
	Roles        []roleFile `yaml:"roles"`
}

type roleFile struct {
	Name         string            `yaml:"name"`
	Path         string            `yaml:"path,omitempty"`
	Value        string            `yaml:"value,omitempty"`
	User         string            `yaml:"user,omitempty"`
	Scopes       []string          `yaml:"scopes,omitempty"`
	Audience     string            `yaml:"audience,omitempty"`
	Resource     string            `yaml:"resource,omitempty"`
	Subject      string            `yaml:"subject,omitempty"`
	SubjectType  string            `yaml:"subjectType,omitempty"`
	Installation int64             `yaml:"installation,omitempty"`
	Repositories []string          `yaml:"repositories,omitempty"`
	Permissions  map[string]string `yaml:"permissions,omitempty"`
	ARN          string            `yaml:"arn,omitempty"`
}

func (p Provider) file() providerFile {
	f := providerFile{
		Name: p.Name, CA: p.CA, TokenFile: p.TokenFile, RoleID: p.SecretRoleID, SecretID: p.SecretSecretID, Namespace: p.Namespace,
		Revoke: p.RevokeURL, ClientID: p.ClientID, ClientSecret: p.SecretClient, InBody: p.ClientInBody, AppID: p.AppID, Key: p.SecretAppKey,
		IAM: p.IAM, Region: p.Region, AccessKeyID: p.SecretAccessKeyID, SecretKey: p.SecretAWS,
	}
	switch p.Kind {
	case ProviderOpenBao:
		f.OpenBao, f.Mount = p.URL, p.Mount
	case ProviderOAuth:
		f.OAuth = p.URL
	case ProviderGitHubApp:
		f.GitHubApp = p.URL
	case ProviderAWS:
		f.AWSSTS = p.URL
	}
	if p.Timeout != 0 {
		f.Timeout = p.Timeout.String()
	}
	if p.MaxLifetime != 0 {
		f.MaxLifetime = p.MaxLifetime.String()
	}
	for _, a := range p.Addresses {
		f.Addresses = append(f.Addresses, a.String())
	}
	for _, r := range p.Roles {
		f.Roles = append(f.Roles, roleFile(r))
	}
	return f
}
